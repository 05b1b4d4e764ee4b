"""The disk tier under attack: flipped bits, power cuts, bare slabs."""
