"""Pictures in parts, encoders as files, and what these are worth."""
