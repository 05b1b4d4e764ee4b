"""What every room builds on: errors, sizes, clocks, tenants and what is fair among them. Imports no other room."""
