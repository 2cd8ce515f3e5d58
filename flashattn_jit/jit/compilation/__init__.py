"""How a kernel is compiled: compilers and their flags, the build, its resource report."""
