"""`compare --modules`: a model of any family, module by module, without a description."""
