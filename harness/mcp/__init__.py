"""Client of the Model Context Protocol: other servers whose tools programs call."""
