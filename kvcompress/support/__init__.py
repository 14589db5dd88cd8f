"""What has nothing to do with caches: files, names of models, packages of extras, progress, vocabulary of others."""
