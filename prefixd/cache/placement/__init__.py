"""Where blocks are: placement in tiers, owners, holds, and retention."""
