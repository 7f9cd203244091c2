"""Selection among several drafts: live on this machine, and simulated on the machines of SPIN's paper."""
