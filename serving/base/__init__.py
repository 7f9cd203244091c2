"""Messages, parameters and tensors that every stage of a step shares."""
