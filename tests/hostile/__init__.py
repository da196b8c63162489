"""An assembler under records that nobody should send, by the hundred thousand."""
