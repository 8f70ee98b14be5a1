# The arguments of a build -> the extras that are installed, in the file "extras". What has a container of its own, or
# would need a compiler here, is refused with a sentence.
set -eu
extras=$EXTRAS
[ "$INSTALL_BNB" = true ] && extras=$extras,quantization
[ "$INSTALL_MODELSCOPE" = true ] && extras=$extras,modelscope
refuse() { echo "$1=true: $2" >&2; exit 1; }
[ "$INSTALL_VLLM" = true ] && refuse INSTALL_VLLM "vLLM wants other versions of torch; run its own container and give its address: infer_url=http://..."
[ "$INSTALL_DEEPSPEED" = true ] && refuse INSTALL_DEEPSPEED "install it in an image of your own: FROM burnish, and pip install deepspeed."
[ "$INSTALL_FLASHATTN" = true ] && refuse INSTALL_FLASHATTN "it is not needed: torch's own attention is used, and nothing is compiled in this image."
echo "$extras" > extras
