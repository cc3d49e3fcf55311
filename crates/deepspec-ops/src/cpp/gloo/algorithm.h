// Stand-ins for gloo's headers, which ProcessGroupGloo.hpp includes and the wheels lack. They declare only what that
// header needs to be parsed. libtorch itself creates and uses every gloo object.
#pragma once
