"""Ghost caches: estimate, from a sample of the blocks, what tiers of other sizes and policies would have found.

ghosts          the face: hears prompts, has a budget of time, answers
prefix_hashes   a hash of every prefix of a prompt, without its block keys
ghost_tier      the sample for one tier; its rate; what it has found, by size and tenant
lru_stack       LRU at every size at once
miniature       another policy at one size
"""
