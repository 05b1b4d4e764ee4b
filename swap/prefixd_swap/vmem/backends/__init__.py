"""Where the memory is: on a GPU through the CUDA driver, or in a memory file of the host."""
