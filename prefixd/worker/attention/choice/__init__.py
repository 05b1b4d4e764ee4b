"""Which kernels a pass calls: a plan by what was measured on the device."""
