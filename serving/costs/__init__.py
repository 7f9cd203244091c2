"""What steps take and give: costs of passes, measured and corrected by live steps, and acceptance, learnt from them."""
