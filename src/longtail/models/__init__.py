"""Networks: backbones, heads, and the momentum network with its queue."""
