"""How the parts of a namespace's blocks are coded in a tier that is read and written by calls."""
