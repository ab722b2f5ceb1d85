"""Draft trees to look at: as plain numpy and text (`trees`), as SVG pictures (`drawing`)."""
