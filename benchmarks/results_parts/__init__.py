"""What `benchmarks.results_page` is made of: the sentence of each result, and which results are refused."""
