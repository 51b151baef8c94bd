"""CUDA kernels: every CUDA source with its Python wrapper. `nvrtc` compiles them when they are first used.

- `sgd`: SGD step and moving average of all parameters in one launch.
- `views`: augmentation, and copying images of different sizes into one tensor.
- `resnet`: training of CIFAR ResNets.
"""
