"""Data modules: objects with a schema and loaders that yield `Batch`. Nothing is imported here, so that the model can
read `recsys_norm.data.schema` without loading a data set's dependencies."""
