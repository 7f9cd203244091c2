"""Files that server and trainer share: paths, versions, locks."""
