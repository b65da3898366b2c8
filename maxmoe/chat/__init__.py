"""Text on one side, token ids on the other: tokenizer, chat encoding, and the parser of what comes back."""
