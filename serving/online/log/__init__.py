"""The replay log: what is recorded of live traffic, and how it is kept and deleted."""
