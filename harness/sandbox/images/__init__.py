"""Images: root file systems of layers, kept in a store of the user, that cells see as their own."""
