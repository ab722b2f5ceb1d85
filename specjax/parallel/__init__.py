"""Models split over devices: `sharding` has the mesh, placements, and bytes on each device."""
