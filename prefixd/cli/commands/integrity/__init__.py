"""Commands that find damage and wrong accounts, and bring back what is left."""
