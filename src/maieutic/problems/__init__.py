"""Problem pairs: schema, loaders, filters, splits, generators, measurement."""
