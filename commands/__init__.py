"""One file a command: joins the offline and the online half, and shows what they do."""
