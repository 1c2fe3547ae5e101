"""A user's Keras programs: networks, data, losses, metrics and steps; and their mistakes."""
