"""Making a draft from a target: its text, the training, the measurement (`specdec distill`)."""
