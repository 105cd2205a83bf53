"""One confined process tree, from its first instruction to the guest's last."""
