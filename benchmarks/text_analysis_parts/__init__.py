"""What `benchmarks.text_analysis` compares, how it is run, what it has to reach, and how it is drawn."""
