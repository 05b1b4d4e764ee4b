"""What figures of the papers are measured with, where no other benchmark has it."""
