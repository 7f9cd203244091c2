"""C++ for CPUs, built on first use by the machine's own compiler. `library` builds; the kernels bind functions."""
