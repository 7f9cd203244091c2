"""The best plan of one step at given estimates: what each source offers, at what price, within what bounds."""
