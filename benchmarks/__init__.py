"""What cells cost, measured on the machine at hand: `cellwright bench`.  Nothing else imports this."""
