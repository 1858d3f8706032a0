"""Looking at checkpoints, and taking them elsewhere: without a device, a model, or the mesh that wrote them.

finding                       which folder an argument means, and what it holds
stored                        one checkpoint on disk: its description, and its arrays part by part
inspect verify                what it holds; whether that is what was saved
export safetensors npy        its arrays as files that other programs read
averages                      where the averages of parameters are
progress                      a line now and then while something takes long

Arrays are read with TensorStore and never on a device. No more than a part of one is held where its chunks allow.
"""
