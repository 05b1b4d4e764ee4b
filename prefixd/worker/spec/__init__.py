"""A model's specification, from its configuration and from one run on meta tensors."""
