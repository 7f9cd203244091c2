"""One engine step: plan, propose, run, verify, commit."""
