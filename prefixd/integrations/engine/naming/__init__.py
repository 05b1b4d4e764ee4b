"""What changes the KV that an engine computes, and so is in the names of its namespaces."""
