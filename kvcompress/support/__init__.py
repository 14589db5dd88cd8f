"""What has nothing to do with caches: checks of arguments, sizes as people write them, files, names of models and of
ours, packages of extras, progress, vocabulary of others."""
