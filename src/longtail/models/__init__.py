"""What looks: trunks, heads, and the momentum network with its queue."""
