// Nothing of it is needed; see ../algorithm.h.
#pragma once
