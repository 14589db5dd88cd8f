"""What the command line shows and does by itself: a chat, texts, figures of a machine and of a plan."""
