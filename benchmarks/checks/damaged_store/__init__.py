"""A shared store whose objects are changed, or made up by an attacker."""
