"""The products written for Hopper, in Gluon, which ships with Triton."""
