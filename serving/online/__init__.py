"""Online adaptation: the draft learns from the traffic it serves (Liu et al. 2023), and only better versions get in."""
