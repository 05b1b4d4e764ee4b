"""Facts that change the KV that an engine computes and therefore go into the names of its namespaces."""
