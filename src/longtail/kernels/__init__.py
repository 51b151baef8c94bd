"""The CUDA kernels of this package, each with its wrapper; `nvrtc` compiles them when they are first needed."""
