"""C++ for CPUs. `library` builds a file on first use, with the machine's own compiler. Kernels bind its functions."""
