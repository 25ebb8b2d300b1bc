"""The kernels of attention that are written for Hopper, in Gluon."""
