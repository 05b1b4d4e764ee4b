"""What chat and tree_search share: ways of serving, requests and their figures."""
