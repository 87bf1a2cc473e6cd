"""`kvanta chat`: a conversation in the terminal."""
