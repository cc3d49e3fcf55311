// Nothing of it is needed. ProcessGroupGloo.hpp names gloo's headers, which the wheels lack; those beside this one declare
// what that header needs to be parsed, and no more: every gloo object is made and used inside of libtorch.
#pragma once
